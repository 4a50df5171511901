{{- define "tandem.model" -}}
{{ .Values.model.name | default (ternary (base .Values.model.path) .Values.model.path (hasPrefix "/" .Values.model.path)) }}
{{- end }}

{{- /* The labels of this release's pods in JSON, of those of a `group` or `kind` where it is given. */ -}}
{{- define "tandem.labels" -}}
{{- $labels := dict "app.kubernetes.io/name" "tandem" "app.kubernetes.io/instance" .root.Release.Name }}
{{- with .group }}{{ $_ := set $labels "tandem/group" . }}{{ end }}
{{- with .kind }}{{ $_ := set $labels "tandem/kind" . }}{{ end }}
{{- toJson $labels }}
{{- end }}

{{- /* Not empty where the planner sets the number of workers. */ -}}
{{- define "tandem.counts" -}}
{{- if and (ne .Values.planner "off") (dig "planner" "max_workers" nil .Values.config) }}yes{{ end -}}
{{- end }}

{{- define "tandem.metadata" -}}
{name: {{ .root.Release.Name }}-{{ .group }}, labels: {{ include "tandem.labels" (pick . "root" "group") }}}
{{- end }}

{{- /* As QueueNames.stream of queue/streams.py. */ -}}
{{- define "tandem.stream" -}}
{{- $names := list -}}
{{- range list (dig "runtime" "namespace" "tandem" .Values.config) (include "tandem.model" .) -}}
{{- $name := . | replace "=" "=3D" | replace "." "=2E" | replace "_" "=5F" | replace "/" "=2F" -}}
{{- if regexMatch "[^A-Za-z0-9=-]" $name }}{{ fail (printf "scale.nats: the name %q has a character that this chart cannot escape" .) }}{{ end -}}
{{- $names = append $names $name -}}
{{- end -}}
tandem_{{ join "_" $names }}_tickets
{{- end }}

{{- define "tandem.secretEnv" -}}
{name: {{ .name }}, valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}}
{{- end }}

{{- /* A pod template of one `tandem` process. Of it: root, group, kind, command, resources, secrets
       (keys of Values.secrets that are mounted), account (a service account), worker (its values), ports, port and scheme of probes. */ -}}
{{- define "tandem.pod" -}}
{{- $values := .root.Values }}
{{- $worker := .worker | default dict }}
{{- $stop := ternary 5 0 (has .kind (list "frontend" "epp")) }}
metadata:
  labels: {{ include "tandem.labels" . }}
  annotations: {tandem/config: {{ include "tandem.config" .root | sha256sum | trunc 16 | quote }}}
spec:
  enableServiceLinks: false # their variables begin with TANDEM_, as Tandem's own do
  serviceAccountName: {{ .account | default "default" }}
  automountServiceAccountToken: {{ not (empty .account) }}
  terminationGracePeriodSeconds: {{ add $stop $values.drainSeconds 15 }}
  imagePullSecrets: {{ toJson $values.image.pullSecrets }}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
  nodeSelector: {{ toJson ($worker.nodeSelector | default dict) }}
  tolerations: {{ toJson ($worker.tolerations | default list) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {{ include "tandem.labels" . }}}
  containers:
    - name: tandem
      image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if and $worker $values.secrets.tls }}
      command: [sh, -c, 'exec tandem "$@" --runtime.advertise_host="$(echo "$POD_IP" | tr .: --).{{ .root.Release.Name }}-peers.{{ .root.Release.Namespace }}.svc"', tandem]
      {{- end }}
      args: {{ toJson (concat .command (list "--config" "/etc/tandem/tandem.yaml")) }}
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: TANDEM_RUNTIME__HOST, value: $(POD_IP)}
        {{ if eq .kind "frontend" }}- {name: TANDEM_RUNTIME__ADVERTISE_HOST, value: $(POD_IP)}{{ end }}
        - {name: HOME, value: /home/tandem}
        - {name: XDG_CACHE_HOME, value: /cache}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: HF_HOME, value: /cache/huggingface}
        {{- with $values.secrets }}
        - {{ include "tandem.secretEnv" (dict "name" "TANDEM_RUNTIME__CLUSTER_TOKEN" "secret" .clusterToken "key" "token") }}
        {{- if .natsUrl }}
        - {{ include "tandem.secretEnv" (dict "name" "TANDEM_RUNTIME__NATS_URL" "secret" .natsUrl "key" "url") }}
        {{- end }}
        {{- if .hub }}
        - {{ include "tandem.secretEnv" (dict "name" "HF_TOKEN" "secret" .hub "key" "token") }}
        {{- end }}
        {{- end }}
        {{- range $worker.env }}
        - {{ toJson . }}
        {{- end }}
      {{- if .port }}
      ports: {{ toJson .ports }}
      # a start may download a model and compile kernels
      startupProbe: {httpGet: {path: /live, port: {{ .port }}, scheme: {{ .scheme }}}, periodSeconds: 5, failureThreshold: 360}
      livenessProbe: {httpGet: {path: /live, port: {{ .port }}, scheme: {{ .scheme }}}, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /health, port: {{ .port }}, scheme: {{ .scheme }}}, timeoutSeconds: 2, periodSeconds: 2}
      {{- end }}
      {{- if $stop }}
      lifecycle: {preStop: {sleep: {seconds: {{ $stop }}}}} # until no Service sends requests here
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError # the log's end stays in the pod's status
      resources: {{ toJson .resources }}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL], add: {{ toJson ($worker.capabilities | default list) }}}}
      volumeMounts:
        - {name: config, mountPath: /etc/tandem, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/tandem}
        - {name: cache, mountPath: /cache}
        {{- if $worker }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.model.volume }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- end }}
        {{- range .secrets }}
        - {name: {{ lower . }}, mountPath: /etc/tandem-{{ lower . }}, readOnly: true}
        {{- end }}
  volumes:
    - {name: config, configMap: {name: {{ .root.Release.Name }}-config}}
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    - {{ toJson (merge (dict "name" "cache") $values.cacheVolume) }}
    {{- if $worker }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $worker.shm | default "1Gi" }}}}
    {{- with $values.model.volume }}
    - {{ toJson (merge (dict "name" "models") .) }}
    {{- end }}
    {{- end }}
    {{- range .secrets }}
    - {name: {{ lower . }}, secret: {secretName: {{ get $values.secrets . }}}}
    {{- end }}
{{- end }}

{{- /* A Deployment of one `tandem` process: as above, and replicas and strategy. */ -}}
{{- define "tandem.deployment" }}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{ include "tandem.metadata" . }}
spec:
  replicas: {{ .replicas }}
  strategy: {{ toJson .strategy }}
  selector: {matchLabels: {{ include "tandem.labels" (pick . "root" "group") }}}
  template: {{- include "tandem.pod" . | nindent 4 }}
{{- end }}

{{- /* A NetworkPolicy of this name for the pods of a kind. */ -}}
{{- define "tandem.policy" }}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{ include "tandem.metadata" (pick . "root" "group") }}, spec: {podSelector: {matchLabels: {{ include "tandem.labels" (pick . "root" "kind") }}}, policyTypes: [Ingress], ingress: {{ toJson .ingress }}}}
{{- end }}
